"""No request that the description of the API leads to is an error of the server."""

import pytest
from pydantic import SecretStr

from tests.clients.schemathesis_run import check_no_errors
from tests.e2e.page_server import serving
from wingbeat.deployments.api.access import Access

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1800)]
KEY = "operators"


def test_no_request_that_the_description_leads_to_is_an_error_of_the_server():
    pytest.importorskip("schemathesis")
    with serving(Access(operator_keys=(SecretStr(KEY),))) as url:
        check_no_errors(url, KEY)
