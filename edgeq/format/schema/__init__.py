"""The FlatBuffers schema of a file's metadata, and the code that flatc generates from it."""
