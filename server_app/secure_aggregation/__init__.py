"""The server's side of sums that it cannot take apart."""
