"""Small helpers without a topic: files, random streams, versions, cores, memory, threads."""
