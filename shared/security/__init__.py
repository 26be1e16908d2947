"""How the services of a deployment know each other: certificates, a shared token, and the files that hold them."""
