"""Bytes on disk to arrays on a mesh, and back."""
