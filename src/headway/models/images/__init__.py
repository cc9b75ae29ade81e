"""Encoded images, untrusted ones too, to the patches that a vision tower takes. Without torch."""
