"""What the pages of the documentation are drawn and written from; the wheel does not have it."""
