"""Points that are read in chunks: files larger than memory, and factories of chunks."""
