"""The name of the CPU engine's attention backend, apart, for tests that do not import SGLang."""

NAME = "av_torch"
