"""Tables and pictures of one run or of several, made from the files of the runs."""
