"""Draft tokens on the device, and accept or reject them."""
