"""The loops of training, and what they are made of."""
