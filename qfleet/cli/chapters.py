"""The chapters of `qfleet --help`."""

from cyclopts import Group

TRAIN = Group("Train", sort_key=1)
LOOK = Group("Look", sort_key=2)
PREPARE = Group("Prepare", sort_key=3)
ABOUT = Group("About", sort_key=4)
COMMANDS = Group("Commands", sort_key=1)
