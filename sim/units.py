"""Units of time, as whole numbers.

Virtual time is in nanoseconds. Cost models compute in femtoseconds, so that the cost of one token
is a whole number too.
"""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
FS_PER_NS = 1_000_000
FS_PER_S = NS_PER_S * FS_PER_NS
