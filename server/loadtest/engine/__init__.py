"""The bare engine measured, without HTTP, beside what others do on the same machine."""
