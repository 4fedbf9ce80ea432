"""Value rescaling: networks predict h(Q), which grows like the square root of Q (Pohlen et al. 2018, prop. A.2).

For tensors, arrays and floats. Both functions avoid cancellation near zero, where single precision would lose most of
its digits.
"""

from typing import TypeVar

from torch import Tensor

from qfleet.data import Array

EPS = 1e-3

Values = TypeVar("Values", Tensor, Array, float)


def signed_hyperbolic(x: Values) -> Values:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x."""
    out: Values = x / ((abs(x) + 1.0) ** 0.5 + 1.0) + EPS * x
    return out


def signed_parabolic(x: Values) -> Values:
    """The inverse of `signed_hyperbolic`: sign(x) (((sqrt(1 + 4 eps (|x| + 1 + eps)) - 1) / (2 eps))^2 - 1)."""
    factor = 2.0 / ((1.0 + 4.0 * EPS * (abs(x) + 1.0 + EPS)) ** 0.5 + 1.0 + 2.0 * EPS)
    out: Values = x * factor * (abs(x) * factor + 2.0)
    return out
