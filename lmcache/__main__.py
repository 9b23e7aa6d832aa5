"""`python -m lmcache` is `lmcache`."""

import sys

from lmcache.cli.main import main

sys.exit(main())
