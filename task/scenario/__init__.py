"""Who learns what when: the class stream, the partition over clients, each client's data."""
