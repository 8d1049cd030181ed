"""Images and labels: data sets by name, a user's own files, the images of a node."""
