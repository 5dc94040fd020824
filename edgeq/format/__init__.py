"""The file format: codecs, records, metadata, reader and writer."""
