"""`python -m phalanx.report`, as it was called before: now `python -m phalanx.telemetry.report`."""

import sys

from phalanx.telemetry.report import main

if __name__ == "__main__":
    print("phalanx.report is now phalanx.telemetry.report", file=sys.stderr)
    sys.exit(main())
