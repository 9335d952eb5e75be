"""How many tokens per second does this machine generate, and what does speculation add?

The same program as `engine-v1 bench`; see README.md beside this file for how to read what it prints.
"""

import sys

from engine_v1.entrypoints.bench import main

if __name__ == "__main__":
    sys.exit(main())
