"""What counts as a right gradient of a published model. The child program imports only this."""

ERROR_RATIO_MAX = 2.0
"""Our error may be this many times that of torch in float32."""

EXACT = 1e-6
"""An error that is always accepted, because it is near the precision of float32."""

WRONG = 1e-3
"""A parameter's relative error that is always accepted."""

WRONG_RATIO_MAX = 10.0
"""A parameter's error may be this many times that of torch in float32."""
