"""A small speculative-decoding runtime that uses av_triton the way any runtime would; `av-triton demo` runs it."""
