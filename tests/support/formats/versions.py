"""Headers of other versions of the protocol."""


def in_version(header, version):
    """Return the header with another protocol version, which is below 128."""
    return bytes((header[0], version)) + header[2:]
