"""Settings of architectures of llama.cpp that are no decoders of the Llama line."""
