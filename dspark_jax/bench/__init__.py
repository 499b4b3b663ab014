"""Measurements that a researcher repeats on a machine: loading and generation, each beside a ceiling or a peer."""
