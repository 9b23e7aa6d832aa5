"""Admission policies: one file each, named as users select them."""
