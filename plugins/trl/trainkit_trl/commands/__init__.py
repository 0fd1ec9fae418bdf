"""What scripts of TRL 0.8 import from `trl.commands`."""
