"""Reports and comparisons of runs: pages of HTML that need no other file and no network."""
