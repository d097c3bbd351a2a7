"""Limits for gradients of published models.

They are a module of their own because the environment of the libraries lacks what `report` needs.
"""

ERROR_RATIO_MAX = 2.0
"""Our error may be this many times that of torch in float32."""

EXACT = 1e-6
"""Errors up to this are always accepted, because they are near the precision of float32."""

WRONG = 1e-3
"""Relative errors of a parameter up to this are always accepted."""

WRONG_RATIO_MAX = 10.0
"""A parameter's error may be this many times that of torch in float32."""

DISTANCE_MAX = 1e-3
"""The values that decide on the sides of kinks may differ by this share from those in float64."""
