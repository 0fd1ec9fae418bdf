"""Looks up an environment variable that is not set."""

import os

os.environ["NOTHING_OF_THIS_NAME"]
