"""Settings of an application, by what they are of; `AppConfig` has all of them."""
