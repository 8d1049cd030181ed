"""Class statistics of features: what clients compute, the noise on it, what the server keeps."""
