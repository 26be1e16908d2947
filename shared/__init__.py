"""What two or more services use. Imports nothing from `services`; each folder says what else it may import."""
