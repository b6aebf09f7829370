/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_names.c - the names of files are those of format.rst, and no id gives a
 * name that leads elsewhere.
 */
#include "engine/format/names.h"

#include "engine/format/address.h"
#include "tests/c/support/check.h"

TEST(test_group_names)
{
    static const struct {
        uint32_t group;
        const char *name;
    } known[] = {
        {1, "groups/00000001"},
        {0xabcdef, "groups/00abcdef"},
        {GD_MAX_GROUP, "groups/01ffffff"},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        char name[GD_NAME_SIZE];
        uint32_t number = 0;
        gd_names_group(known[i].group, name);
        CHECK(strcmp(name, known[i].name) == 0);
        CHECK(gd_names_parse_group(name + 7, &number));
        CHECK_INT(number, known[i].group);
    }
}

TEST(test_what_is_no_group_name)
{
    static const char *const names[] = {
        "",          "0",         "0000001",   "000000001", "00000000",
        "02000000",  "ffffffff",  "0000000A",  "0000000g",  "0000 001",
        "-0000001",  "+0000001",  "0x000001",  "00000001~", ".0000001",
        "00000001.", "0000000\n", "\xff-000001"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        uint32_t number;
        if (!CHECK(!gd_names_parse_group(names[i], &number))) {
            fprintf(stderr, "\"%s\" was taken for %u\n", names[i], number);
        }
    }
}

TEST(test_image_names)
{
    char id[GD_IMAGE_ID_MAX + 2], name[GD_NAME_SIZE], wanted[GD_NAME_SIZE];
    gd_error err;
    CHECK_INT(gd_names_image("a", name, &err), GD_OK);
    CHECK(strcmp(name, "images/a") == 0);
    CHECK_INT(gd_names_image("01234567-89ab-CDEF_z", name, &err), GD_OK);
    CHECK(strcmp(name, "images/01234567-89ab-CDEF_z") == 0);
    memset(id, 'x', sizeof id);
    id[GD_IMAGE_ID_MAX] = '\0';
    snprintf(wanted, sizeof wanted, "images/%s", id);
    CHECK_INT(gd_names_image(id, name, &err), GD_OK);
    CHECK(strcmp(name, wanted) == 0);
    id[GD_IMAGE_ID_MAX] = 'x';
    id[GD_IMAGE_ID_MAX + 1] = '\0';
    CHECK_INT(gd_names_image(id, name, &err), GD_INVALID);
    CHECK_CONTAINS(err.text, "more");
    CHECK_INT(gd_names_image("", name, &err), GD_INVALID);
    CHECK_CONTAINS(err.text, "none");
}

/* All other bytes are refused, at the start, in the middle and at the end. */
TEST(test_characters_of_image_ids)
{
    static const char good[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                               "abcdefghijklmnopqrstuvwxyz0123456789_-";
    for (int c = 1; c < 256; c++) {
        gd_status wanted = strchr(good, c) != NULL ? GD_OK : GD_INVALID;
        for (int at = 0; at < 3; at++) {
            char id[] = "xyz", name[GD_NAME_SIZE];
            gd_error err;
            id[at] = (char)c;
            CHECK_INT(gd_names_image(id, name, &err), wanted);
        }
    }
}

TEST(test_spool_names)
{
    static const uint8_t id[GD_ID_SIZE] = {0, 1, 0xab, 255, [15] = 0x10};
    char name[GD_NAME_SIZE];
    gd_names_spool(GD_SPOOL_STORE, id, name);
    CHECK(strcmp(name, "spool/T-0001abff000000000000000000000010") == 0);
    gd_names_spool(GD_SPOOL_DELETED, id, name);
    CHECK(strcmp(name, "spool/D-0001abff000000000000000000000010") == 0);
    gd_names_spool(GD_SPOOL_GROUP, id, name);
    CHECK(strcmp(name, "spool/G-0001abff000000000000000000000010") == 0);
}

/* Names of each kind are made and parsed. */
TEST(test_parsed_spool_names)
{
    static const gd_spool_kind kinds[] = {
        GD_SPOOL_STORE,  GD_SPOOL_DELETED,  GD_SPOOL_GROUP,
        GD_SPOOL_MERGED, GD_SPOOL_REPLACED, GD_SPOOL_EXCHANGE};
    static const uint8_t id[GD_ID_SIZE] = {0x9f, 1, 0xab, 255, [15] = 0x10};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        char name[GD_NAME_SIZE];
        gd_spool_kind kind;
        uint8_t parsed[GD_ID_SIZE];
        gd_names_spool(kinds[i], id, name);
        CHECK(gd_names_parse_spool(strchr(name, '/') + 1, &kind, parsed));
        CHECK_INT(kind, kinds[i]);
        CHECK(memcmp(parsed, id, sizeof id) == 0);
    }
    static const char *const strange[] = {
        "", "T", "T-", ".T-0001abff00000000000000000000001",
        "Z-0001abff000000000000000000000010",
        "t-0001abff000000000000000000000010",
        "T_0001abff000000000000000000000010",
        "T-0001ABFF000000000000000000000010",
        "T-0001abff00000000000000000000001",
        "T-0001abff0000000000000000000000100",
        "T-0001abff00000000000000000000001 ",
        "T-0001abff00000000/00000000000010"};
    for (size_t i = 0; i < sizeof strange / sizeof strange[0]; i++) {
        gd_spool_kind kind;
        uint8_t parsed[GD_ID_SIZE];
        if (!CHECK(!gd_names_parse_spool(strange[i], &kind, parsed))) {
            fprintf(stderr, "\"%s\" was taken for an entry\n", strange[i]);
        }
    }
    char name[GD_NAME_SIZE];
    gd_names_spares(0x1ab, name);
    CHECK(strcmp(name, "spares/000001ab") == 0);
}
