"""Commands beside training: plan, checks of machines, evaluation, sampling, export, reports and conversions."""
