"""python -m server_app.cli: the fcil command where it is not installed."""

import sys

from server_app.cli.main import main

sys.exit(main())
