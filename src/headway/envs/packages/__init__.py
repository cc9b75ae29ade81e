"""Environments as packages: written from a template, built, published in an index, installed, locked and recorded."""
