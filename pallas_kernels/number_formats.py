"""Exact codecs of the small number formats, for use inside jitted code and kernels.

Three formats: e4m3 (FP8 "E4M3FN": bias 7, largest 448, no infinity, 0x7F and 0xFF are NaN), e2m1 (FP4: bias 1, the
magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6) and e8m0 (a byte b means 2^(b - 127), 0xFF is NaN; neither zero nor sign).
Block-scaled weights are an e4m3 or e2m1 value times an e8m0 scale.

Everything here is integer arithmetic on the bits. XLA on CPU flushes float32 subnormals to zero, in casts and products
too, and e8m0 byte 0 (2^-127) is already one; a product with it would be lost even where the result is a normal number.
"""

import jax
import jax.numpy as jnp

E4M3_MANTISSA_BITS, E4M3_BIAS = 3, 7
E4M3_LARGEST, E4M3_NAN = 0x7E, 0x7F
E2M1_MANTISSA_BITS, E2M1_BIAS = 1, 1
E2M1_LARGEST = 0x7
E8M0_BIAS, E8M0_NAN = 127, 0xFF

FLOAT32_MANTISSA_BITS, FLOAT32_BIAS = 23, 127
FLOAT32_MANTISSA = (1 << FLOAT32_MANTISSA_BITS) - 1
FLOAT32_MAGNITUDE = 0x7FFFFFFF
FLOAT32_INFINITY = 0x7F800000
FLOAT32_SMALLEST_EXPONENT = -149  # of the smallest subnormal


def assemble(sign: jax.Array, significand: jax.Array, exponent: jax.Array) -> jax.Array:
    """The float32 (-1)^sign * significand * 2^exponent, exact, subnormals included.

    Args:
        sign: int32, 1 for minus; a zero keeps its sign.
        significand: int32 in 0..15.
        exponent: int32, at least -149 (the smallest product of two formats of this file is 2^-136). Results above the
            float32 range are infinite.

    Returns:
        float32 of the arguments' common shape.
    """
    # A whole number below 16 is zero or normal in float32, so this conversion is safe; the rest is integers.
    whole = jax.lax.bitcast_convert_type(significand.astype(jnp.float32), jnp.int32)
    normal = whole + (exponent << FLOAT32_MANTISSA_BITS)
    subnormal = significand << jnp.clip(exponent - FLOAT32_SMALLEST_EXPONENT, 0, FLOAT32_MANTISSA_BITS)
    exponent_field = (whole >> FLOAT32_MANTISSA_BITS) + exponent
    magnitude = jnp.where(exponent_field > 0, normal, subnormal)
    magnitude = jnp.where(exponent_field > 254, FLOAT32_INFINITY, magnitude)
    magnitude = jnp.where(significand == 0, 0, magnitude)
    return jax.lax.bitcast_convert_type((sign << 31) | magnitude, jnp.float32)


def decode_e8m0(codes: jax.Array) -> jax.Array:
    """Scales as numbers: uint8 b -> float32 2^(b - 127); 0xFF -> NaN."""
    exponent = codes.astype(jnp.int32) - E8M0_BIAS
    scales = assemble(jnp.zeros_like(exponent), jnp.ones_like(exponent), exponent)
    return jnp.where(codes == E8M0_NAN, jnp.nan, scales)


def decode_scaled_e4m3(codes: jax.Array, scale_codes: jax.Array) -> jax.Array:
    """e4m3 uint8 codes times e8m0 uint8 scales of the same shape (or one scalar scale) -> float32, exact.

    NaN where the code is 0x7F or 0xFF or the scale is 0xFF; infinite where the product exceeds float32.
    """
    code = codes.astype(jnp.int32)
    values = _assemble_scaled(code >> 7, code & 0x7F, scale_codes, E4M3_MANTISSA_BITS, E4M3_BIAS)
    return jnp.where(((code & 0x7F) == E4M3_NAN) | (scale_codes == E8M0_NAN), jnp.nan, values)


def decode_scaled_e2m1(codes: jax.Array, scale_codes: jax.Array) -> jax.Array:
    """e2m1 codes (uint8 in 0..15) times e8m0 uint8 scales of the same shape (or one scalar scale) -> float32, exact.

    NaN where the scale is 0xFF; infinite where the product exceeds float32.
    """
    code = codes.astype(jnp.int32)
    values = _assemble_scaled(code >> 3, code & 0x7, scale_codes, E2M1_MANTISSA_BITS, E2M1_BIAS)
    return jnp.where(scale_codes == E8M0_NAN, jnp.nan, values)


def decode_e4m3(codes: jax.Array) -> jax.Array:
    """e4m3 uint8 codes -> float32 of the same shape; 0x7F and 0xFF -> NaN."""
    return decode_scaled_e4m3(codes, jnp.uint8(E8M0_BIAS))


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """e2m1 codes (uint8 in 0..15) -> float32 of the same shape; code 8 is minus zero."""
    return decode_scaled_e2m1(codes, jnp.uint8(E8M0_BIAS))


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """Two 4-bit codes a byte: uint8 [..., k/2] -> uint8 [..., k]; the low nibble is the even column."""
    pairs = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """The inverse of `unpack_nibbles`: uint8 [..., k] of 4-bit codes -> uint8 [..., k/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def encode_e4m3(values: jax.Array) -> jax.Array:
    """float32 -> e4m3 uint8 of the same shape: to nearest, ties to even, saturating at +-448.

    The sign of a zero (or of what rounds to zero) is kept; NaN -> 0x7F, the sign of a NaN is dropped.
    """
    sign, magnitude = _split_float32(values)
    code = jnp.minimum(_round_magnitude(magnitude, E4M3_MANTISSA_BITS, E4M3_BIAS), E4M3_LARGEST)
    signed = (sign << 7) | code
    return jnp.where(magnitude > FLOAT32_INFINITY, E4M3_NAN, signed).astype(jnp.uint8)


def encode_e2m1(values: jax.Array) -> jax.Array:
    """float32 -> e2m1 codes, uint8 in 0..15 of the same shape: to nearest, ties to even, saturating at +-6.

    Ties: .25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4. The sign of a zero (or of what rounds
    to zero) is kept. The format has no NaN: a NaN saturates like an infinity.
    """
    sign, magnitude = _split_float32(values)
    code = jnp.minimum(_round_magnitude(magnitude, E2M1_MANTISSA_BITS, E2M1_BIAS), E2M1_LARGEST)
    return ((sign << 3) | code).astype(jnp.uint8)


def power_of_two_scale_exponent(amax: jax.Array, reciprocal_qmax: jax.Array) -> jax.Array:
    """ceil(log2(amax * reciprocal_qmax)), the exponent of the scale that lets amax fit, read off the product's bits.

    The official quantisers do it in this way: one float32 product, its exponent, plus one if any mantissa bit is set.

    Args:
        amax: float32 > 0, floored by the caller so that the product is at least 2^-126.
        reciprocal_qmax: float32(1 / qmax), broadcastable.

    Returns:
        int32 of amax's shape.
    """
    bits = jax.lax.bitcast_convert_type(amax * reciprocal_qmax, jnp.int32)
    exponent = (bits >> FLOAT32_MANTISSA_BITS) - FLOAT32_BIAS
    return exponent + ((bits & FLOAT32_MANTISSA) != 0).astype(jnp.int32)


def _assemble_scaled(
    sign: jax.Array, magnitude: jax.Array, scale_codes: jax.Array, mantissa_bits: int, bias: int
) -> jax.Array:
    """Value of sign and magnitude bits (int32) of a small format times 2^(scale - 127); NaN codes are the caller's."""
    exponent_field = magnitude >> mantissa_bits
    implicit_one = (exponent_field > 0).astype(jnp.int32) << mantissa_bits
    significand = implicit_one | (magnitude & ((1 << mantissa_bits) - 1))
    exponent = jnp.maximum(exponent_field, 1) - (bias + mantissa_bits)
    return assemble(sign, significand, exponent + (scale_codes.astype(jnp.int32) - E8M0_BIAS))


def _split_float32(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sign (0 or 1) and the other 31 bits of float32 values, both int32."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return (bits < 0).astype(jnp.int32), bits & FLOAT32_MAGNITUDE


def _round_magnitude(magnitude: jax.Array, mantissa_bits: int, bias: int) -> jax.Array:
    """Exponent and mantissa bits (int32) of the nearest number of a small format, ties to even, without a largest one.

    Below the format's smallest normal number its grid stops getting finer, so more bits are shifted out there.
    A carry out of the rounded significand runs into the exponent field, as it should.
    """
    smallest_normal = FLOAT32_BIAS + 1 - bias  # as a float32 exponent field
    exponent_field = magnitude >> FLOAT32_MANTISSA_BITS
    significand = (magnitude & FLOAT32_MANTISSA) | (1 << FLOAT32_MANTISSA_BITS)
    shift = FLOAT32_MANTISSA_BITS - mantissa_bits + jnp.maximum(smallest_normal - exponent_field, 0)
    # 25 places turn every significand, float32 subnormals' wrong implicit one included, into zero.
    kept = _shift_right_to_even(significand, jnp.minimum(shift, FLOAT32_MANTISSA_BITS + 2))
    return kept + (jnp.maximum(exponent_field - smallest_normal, 0) << mantissa_bits)


def _shift_right_to_even(value: jax.Array, shift: jax.Array) -> jax.Array:
    """round(value / 2^shift), halves to even: int32 value >= 0, shift >= 1."""
    odd = (value >> shift) & 1
    return (value + (jnp.int32(1) << (shift - 1)) - 1 + odd) >> shift
