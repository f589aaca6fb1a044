"""Hook by which `wingbeat inspect` reads one-pass heads."""

head_findings = "wingbeat.deployments.one_pass.inspect_one_pass:one_pass_findings"
