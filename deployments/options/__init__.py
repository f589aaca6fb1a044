"""Settings of an application, grouped by subject; `AppConfig` inherits all of them."""
