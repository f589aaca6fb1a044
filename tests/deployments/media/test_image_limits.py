"""Errors of images name the field; nothing is read beyond the limits."""

import asyncio
import json
import zlib
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np
import pytest
from aiohttp import web

from tests.deployments.http_world import TOKENIZER, FakePool
from tests.deployments.media.media_checkpoint import data_url, encoded, image_part, picture
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.unserved_fields import none_ignored
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import ApiError
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import EngineOverloaded
from wingbeat.deployments.media.decode import decode_image
from wingbeat.deployments.media.fetch import Fetcher, is_public
from wingbeat.deployments.media.limits import MediaError, MediaLimits
from wingbeat.deployments.media.opening import MediaRefused
from wingbeat.deployments.media.reader import MediaReader, decoder_of
from wingbeat.deployments.media.settings import limits_of
from wingbeat.runtime.media.media_input import MediaInput
from wingbeat.runtime.media.processor import ReadMedia

LIMITS = MediaLimits(frozenset({"outer.test", "inner.test", "10.0.0.7"}), {"image": 2}, 2**16, 10_000, 0.5, 2)
GOOD = encoded(picture())


class NoProcessor:
    """Takes pictures of any shape but strips."""

    kind = "image"

    def read(self, image):
        if image.width > 20 * image.height:
            raise ValueError("a strip")
        return ReadMedia({}, 1, None)

    def expand(self, text, images):
        return text

    def place(self, token_ids, images):
        return ()


def reader_of(limits, fetcher=None):
    return MediaReader(NoProcessor(), limits, decoder_of(NoProcessor(), limits), fetcher)


def service(fetcher=None, limits=LIMITS):
    return CompletionService(FakePool(), TOKENIZER, prompt_reader=reader_of(limits, fetcher))


def body_of(*urls):
    content = [{"type": "text", "text": "see"}, *map(image_part, urls)]
    return ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": content}]}).encode())


def refusal(*urls, fetcher=None, limits=LIMITS) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asyncio.run(service(fetcher, limits).plan_chat(body_of(*urls)))
    assert caught.value.status == 400
    return caught.value


def large_png(width, height):
    """A PNG whose header states this size, followed by hardly any data."""
    data = bytearray(GOOD)
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


DAMAGED = {
    "no base64": ("data:image/png,hello", "is not a data URL in base64"),
    "bad base64": ("data:image/png;base64,a*b=", "is not valid base64"),
    "empty": ("data:image/png;base64,", "is not an image that can be decoded"),
    "text": (data_url(b"hello, I am text"), "is not an image that can be decoded"),
    "svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "is not an image that can be"),
    "cut off": (data_url(GOOD[: len(GOOD) // 2]), "is not an image that can be decoded"),
    "tiff": (data_url(encoded(picture(), "TIFF")), "is not an image that can be decoded"),
    "50 megapixels": (data_url(large_png(10_000, 5_000)), "has 10000 x 5000 pixels, this server takes at most 10000"),
    "many bytes": (data_url(bytes(2**16 + 3)), "has more than 65536 bytes"),
    "strip": (data_url(encoded(picture(0, 100, 4))), "cannot be read by this model: a strip"),
    "file": ("file:///etc/passwd", "must be a URL of scheme http, https or data"),
    "no URL": ("http://[::1", "is not a URL"),
    "other host": ("http://else.test/a.png", "is at a host that is not in --allowed-media-domains"),
    "private": ("http://10.0.0.7/a.png", "is at an address that is not public"),
    "user": ("http://me:secret@outer.test/a.png", "contains a user name"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_image_that_cannot_be_used_is_named(name):
    url, problem = DAMAGED[name]
    error = refusal(data_url(GOOD), url)
    assert error.param == "messages[0].content[2].image_url"
    assert f"'messages[0].content[2].image_url' {problem}" in error.message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pictures_of_every_format_are_read_upright_in_rgb(kind):
    turned = picture(0, 24, 16).getexif()
    turned[0x0112] = 6
    options = {"exif": turned} if kind in ("PNG", "JPEG", "WEBP") else {}
    got = decode_image(encoded(picture(0, 24, 16), kind, **options), LIMITS)
    assert (got.mode, got.size) == ("RGB", (16, 24) if options else (24, 16))


def test_one_image_too_many_is_named():
    error = refusal(*[data_url(GOOD)] * 3)
    assert error.param == "messages[0].content[3].image_url"
    assert "this server takes at most 2 (limit_mm_per_prompt)" in error.message


PARTS = {
    "no object": ({"type": "image_url", "image_url": "http://a"}, "image_url", "must be an object with a 'url'"),
    "no url": ({"type": "image_url", "image_url": {}}, "image_url", "must be an object with a 'url'"),
    "low": (
        {"type": "image_url", "image_url": {"url": "data:", "detail": "low"}},
        "image_url.detail",
        "is not supported",
    ),
    "field": ({"type": "image_url", "image_url": {"url": "data:"}, "uuid": "1"}, "uuid", "Unknown parameter"),
    "inner field": ({"type": "image_url", "image_url": {"url": "data:", "size": 1}}, "image_url.size", "Unknown"),
    "video": ({"type": "video_url", "video_url": {"url": "data:"}}, "type", "'video_url' are not supported"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_malformed_or_of_another_kind_is_named(name):
    part, field, problem = PARTS[name]
    with none_ignored(), pytest.raises(ApiError) as caught:
        ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
    assert caught.value.param == f"messages[0].content[0].{field}"
    assert problem in caught.value.message


def test_images_are_the_users_alone():
    content = [image_part(data_url(GOOD))]
    with pytest.raises(ApiError) as caught:
        ChatBody.parse(json.dumps({"messages": [{"role": "system", "content": content}]}).encode())
    assert caught.value.param == "messages[0].content[0].image_url"


def test_what_parts_are_read_into_is_no_field_of_a_request():
    with none_ignored(), pytest.raises(ApiError, match=r"messages\[0\].parts"):
        ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": "a", "parts": []}]}).encode())


@pytest.mark.parametrize(
    ("images", "reason"),
    [(None, "only 'text' is"), (MediaRefused({"image": "images are not served with model_type x"}), "model_type x")],
)
def test_a_model_without_images_refuses_them_by_the_parts_type(images, reason):
    served = CompletionService(FakePool(), TOKENIZER, prompt_reader=images)
    with pytest.raises(ApiError, match=reason) as caught:
        asyncio.run(served.plan_chat(body_of(data_url(GOOD))))
    assert (caught.value.status, caught.value.param) == (400, "messages[0].content[1].type")


class Site(NamedTuple):
    """A web server of this machine, under the names that a test gives it."""

    port: int
    fetcher: Fetcher
    seen: list[str]
    """Hosts that were resolved."""

    def url(self, path, host="outer.test"):
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def site(addresses):
    """Addresses by host name. 127.0.0.1 counts as public, since the test's server listens there."""
    routes, seen = web.RouteTableDef(), []

    @routes.get("/good")
    async def good(request):
        return web.Response(body=GOOD, content_type="image/png")

    @routes.get("/endless")
    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(2**14))

    @routes.get("/slow")
    async def slow(request):
        await asyncio.sleep(60)

    @routes.get("/to")
    async def to(request):
        raise web.HTTPFound(request.query["url"])

    async def resolve(host, port):
        seen.append(host)
        return addresses[host]

    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        server = web.TCPSite(runner, "127.0.0.1", 0)
        await server.start()
        port = server._server.sockets[0].getsockname()[1]
        fetcher = Fetcher(LIMITS, "image", resolve, lambda address: address == "127.0.0.1" or is_public(address))
        yield Site(port, fetcher, seen)
    finally:
        await runner.cleanup()


def fetched(url_of, **addresses):
    """The image or the error that a URL yields, and the hosts that were resolved."""

    async def run():
        async with site({"outer.test": ["127.0.0.1"], "inner.test": ["10.0.0.7"]} | addresses) as at:
            try:
                return await at.fetcher.fetch(url_of(at)), at.seen
            except MediaError as error:
                return str(error), at.seen

    return asyncio.run(run())


def test_an_image_of_an_allowed_host_is_fetched_through_redirects():
    assert fetched(lambda at: at.url("/good")) == (GOOD, ["outer.test"])
    got, seen = fetched(lambda at: at.url(f"/to?url={at.url('/good')}"))
    assert (got, seen) == (GOOD, ["outer.test", "outer.test"])


REDIRECTED = {
    "a name of the inner network": ("http://inner.test/", "is at an address that is not public"),
    "a private address": ("http://10.0.0.7/", "is at an address that is not public"),
    "another host": ("http://else.test/", "is at a host that is not in --allowed-media-domains"),
    "a file": ("file:///etc/passwd", "must be a URL of scheme http, https or data"),
    "itself": ("/to?url=/to", "is redirected more than 2 times"),
}


@pytest.mark.parametrize("name", REDIRECTED)
def test_a_redirect_that_may_not_be_followed_is_refused(name):
    target, problem = REDIRECTED[name]
    if name == "itself":
        got, _ = fetched(lambda at: at.url("/to?url=" + at.url("/to?url=" + at.url("/to?url=/good"))))
    else:
        got, _ = fetched(lambda at: at.url(f"/to?url={target}"))
    assert problem in got


def test_a_redirect_to_a_private_address_is_400_by_the_images_name():
    async def run():
        async with site({"outer.test": ["127.0.0.1"], "inner.test": ["10.0.0.7"]}) as at:
            url = at.url("/to?url=http://inner.test/")
            with pytest.raises(ApiError) as caught:
                await service(at.fetcher).plan_chat(body_of(url))
            return caught.value

    error = asyncio.run(run())
    assert (error.status, error.param) == (400, "messages[0].content[1].image_url")
    assert "is at an address that is not public" in error.message


def test_a_name_with_one_private_address_among_others_is_refused():
    got, _ = fetched(lambda at: at.url("/good"), **{"outer.test": ["127.0.0.1", "192.168.1.1"]})
    assert got == "is at an address that is not public"


@pytest.mark.parametrize(
    ("path", "problem"),
    [("/endless", "has more than 65536 bytes"), ("/slow", "took longer to fetch"), ("/none", "its host answered 404")],
)
def test_what_an_allowed_host_sends_is_bounded(path, problem):
    assert problem in fetched(lambda at: at.url(path))[0]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *[(address, True) for address in ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946")],
        *[(a, False) for a in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0")],
        *[
            (a, False)
            for a in ("100.64.0.1", "224.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1")
        ],
        *[
            (a, False)
            for a in ("::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "2001:0:1::1", "255.255.255.255")
        ],
    ],
)
def test_which_addresses_are_public(address, public):
    assert is_public(address) == public


def test_images_of_running_requests_are_bounded_and_what_has_ended_makes_room():
    reader = reader_of(MediaLimits(max_held_bytes=100))
    image = MediaInput.of(0, 1, {"pixel_values": np.zeros(10)})
    with reader.held((image,)):
        with pytest.raises(EngineOverloaded), reader.held((image,)):
            pass
        with reader.held(()):
            assert reader.num_held_bytes == 80
    with reader.held((image, image)):  # more than the bound alone: it would never run
        pass
    assert reader.num_held_bytes == 0


def test_no_image_is_larger_than_what_a_router_holds_of_all():
    assert limits_of(AppConfig()) == MediaLimits()
    small = limits_of(AppConfig(max_media_memory_bytes=1000, limit_mm_per_prompt={"image": 2}))
    assert (small.max_bytes, small.max_held_bytes, small.per_request) == (1000, 1000, {"image": 2, "audio": 4})
