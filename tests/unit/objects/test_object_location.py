# SPDX-License-Identifier: Apache-2.0

"""Locations of objects are parsed from the notations of users and files."""

import pytest

from glance_dedup.base import exceptions
from glance_dedup.objects import object_location


@pytest.mark.parametrize('url, kind, container, prefix', [
    ('s3://images/cloud-1/cold', 's3', 'images', 'cloud-1/cold'),
    ('s3://a.b-c/x/', 's3', 'a.b-c', 'x'),
    ('swift://Glance_cold/x', 'swift', 'Glance_cold', 'x')])
def test_urls(url, kind, container, prefix):
    parsed = object_location.parse(url)
    assert (parsed.kind, parsed.container, parsed.prefix) == (
        kind, container, prefix)
    assert parsed.url == url.rstrip('/')
    assert object_location.from_fields(parsed.fields()) == parsed


@pytest.mark.parametrize('url', [
    '', 's3', 's3://', 's3://bucket', 's3:/bucket/x', 'http://bucket/x',
    's3://bucket/', 's3:///x', 's3://Bucket/x', 's3://b/x', 's3://bu cket/x',
    's3://bucket/..', 's3://bucket/a/./b', 's3://bucket/a//b',
    's3://bucket/a\nb', 's3://bucket/\u00e9', 's3://bucket/a?b',
    's3://bucket/' + 'a' * 513, 'swift://a/b/../c', 'swift://\x1b[2J/x'])
def test_urls_that_are_none(url):
    with pytest.raises(exceptions.InvalidParameter) as raised:
        object_location.parse(url)
    assert '\x1b' not in str(raised.value)


@pytest.mark.parametrize('endpoint', [
    'host', 'ftp://host', 'https://', 'https://user:secret@host',
    'https://host?x=y', 'https://host#x', 'https://host:0', 'https://host:x',
    'https://host:99999', 'https://ho st', 'https://h\u00f6st',
    'https://[::1'])
def test_endpoints_that_are_none(endpoint):
    with pytest.raises(exceptions.InvalidParameter):
        object_location.parse('s3://bucket/x', endpoint)


def test_an_endpoint_and_what_else_there_is():
    parsed = object_location.parse('s3://bucket/x', 'https://host:8080/',
                                   'region-1',
                                   '/etc/ca.pem')
    assert parsed.endpoint == 'https://host:8080'
    assert object_location.from_fields(parsed.fields()) == parsed
    with pytest.raises(exceptions.InvalidParameter, match='region'):
        object_location.parse('s3://bucket/x', region='a b')
    with pytest.raises(exceptions.InvalidParameter, match='catalogue'):
        object_location.parse('swift://container/x', 'https://host')


@pytest.mark.parametrize('change', [
    {'kind': 'nfs'}, {'kind': 1}, {'more': 'x'}, {'container': None},
    {'prefix': '../x'}, {'endpoint': 'file:///etc'}])
def test_fields_of_a_file_are_not_trusted(change):
    fields = object_location.parse('s3://bucket/x').fields()
    with pytest.raises(exceptions.InvalidParameter):
        object_location.from_fields(fields | change)
    fields.pop('prefix')
    with pytest.raises(exceptions.InvalidParameter):
        object_location.from_fields(fields)
