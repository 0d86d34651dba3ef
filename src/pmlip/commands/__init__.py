"""The work behind the commands, one file each: from files to files, with a progress bar between."""
