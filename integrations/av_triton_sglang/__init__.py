"""SGLang plug-in: `--enable-adaptive-verification`."""
