"""`python -m phalanx.convert_open_clip`, as it was called before: now `python -m phalanx.tools.convert_open_clip`."""

import sys

from phalanx.tools.convert_open_clip import main

if __name__ == "__main__":
    print("phalanx.convert_open_clip is now phalanx.tools.convert_open_clip", file=sys.stderr)
    sys.exit(main())
