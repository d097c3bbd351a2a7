"""How the hub decides: small frozen values, named in TOML by `kind`, composed and never inherited."""
