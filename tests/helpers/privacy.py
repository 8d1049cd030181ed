"""Settings that several tests of noise share."""

PRIVATE = {"privacy-clip": 1.0, "privacy-noise": 1.0, "privacy-feature-clip": 10.0, "privacy-seeded": True}
