/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_file.c - modes follow the repository's directory, whatever the umask;
 * links are not followed, and strange files are refused.
 */
#include "engine/files/file.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/format/names.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

static scratch x;

static mode_t
mode_of(const char *name)
{
    struct stat st;
    CHECK_INT(fstatat(x.root, name, &st, AT_SYMLINK_NOFOLLOW), 0);
    return st.st_mode & 07777;
}

TEST(test_modes)
{
    static const mode_t umasks[] = {0, 022, 077, 0777};
    for (size_t i = 0; i < 2 * sizeof umasks / sizeof *umasks; i++) {
        bool shared = i % 2 != 0;
        int fd;
        scratch_init(&x);
        CHECK_INT(fchmod(x.root, shared ? 02770 : 0700), 0);
        mode_t old = umask(umasks[i / 2]);
        CHECK_INT(gd_file_create(x.env, x.root, "spool/a", O_RDWR, &fd,
                                 &x.err), GD_OK);
        x.env->close(x.env, fd);
        CHECK_INT(gd_file_open_or_create(x.env, x.root, "fence", &fd, &x.err),
                  GD_OK);
        x.env->close(x.env, fd);
        CHECK_INT(gd_file_create_directory(x.env, x.root, "spares", &x.err),
                  GD_OK);
        umask(old);
        CHECK_INT(mode_of("spool/a"), shared ? 0660 : 0600);
        CHECK_INT(mode_of("fence"), shared ? 0660 : 0600);
        CHECK_INT(mode_of("spares"), shared ? 02770 : 0700);
        CHECK_INT(scratch_destroy(&x), 0);
    }
}

TEST(test_mode_cannot_be_had)
{
    int fd;
    scratch_init(&x);
    mode_t old = umask(0777);
    fault_env_fail(&x.f, FAULT_FCHMOD, 1, EPERM, false);
    CHECK_INT(gd_file_create(x.env, x.root, "spool/a", O_RDWR, &fd, &x.err),
              GD_DENIED);
    umask(old);
    CHECK(strstr(x.err.text, "spool/a") != NULL);
    CHECK(!scratch_exists(&x, "spool/a"));
    CHECK_INT(scratch_destroy(&x), 0);
}

typedef struct plant {
    const char *what;
    gd_status wanted;
} plant;

static const plant plants[] = {
    {"link", GD_IO},
    {"dangling", GD_IO},
    {"hard link", GD_CORRUPT},
    {"fifo", GD_CORRUPT},
    {"directory", GD_IO},
};

static void
put_plant(const char *what, const char *name)
{
    int rc = -1;
    scratch_write(&x, "target", "foreign", 7, 0);
    CHECK_INT(fchmodat(x.root, "target", 0640, 0), 0);
    if (strcmp(what, "link") == 0) {
        rc = symlinkat("target", x.root, name);
    } else if (strcmp(what, "dangling") == 0) {
        rc = symlinkat("nowhere", x.root, name);
    } else if (strcmp(what, "hard link") == 0) {
        rc = linkat(x.root, "target", x.root, name, 0);
    } else if (strcmp(what, "fifo") == 0) {
        rc = mkfifoat(x.root, name, 0600);
    } else if (strcmp(what, "directory") == 0) {
        rc = mkdirat(x.root, name, 0700);
    }
    REQUIRE(rc == 0);
}

TEST(test_what_is_not_ours)
{
    for (size_t i = 0; i < sizeof plants / sizeof *plants; i++) {
        int fd;
        char content[7];
        scratch_init(&x);
        put_plant(plants[i].what, "fence");
        CHECK_INT(gd_file_open_or_create(x.env, x.root, "fence", &fd, &x.err),
                  plants[i].wanted);
        CHECK_INT(fd, -1);
        CHECK(strstr(x.err.text, "fence") != NULL);
        CHECK_INT(gd_file_create(x.env, x.root, "fence", O_RDWR, &fd, &x.err),
                  GD_EXISTS);
        CHECK_INT(scratch_size(&x, "target"), 7);
        scratch_read(&x, "target", content, 7, 0);
        CHECK(memcmp(content, "foreign", 7) == 0);
        CHECK_INT(mode_of("target"), 0640);
        CHECK(!scratch_exists(&x, "nowhere"));
        CHECK_INT(scratch_destroy(&x), 0);
    }
}

TEST(test_directories)
{
    static const char *const names[] = {"groups", "images", "spool", "locks",
                                        "quarantine", "spares"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int fd;
        char file[GD_NAME_SIZE];
        gd_repo *repo;
        scratch_init(&x);
        CHECK_INT(mkdirat(x.root, "elsewhere", 0700), 0);
        (void)renameat(x.root, names[i], x.root, "aside");
        CHECK_INT(symlinkat("elsewhere", x.root, names[i]), 0);
        CHECK_INT(scratch_try_repo(&x, false, &repo), GD_CORRUPT);
        CHECK(strstr(x.err.text, names[i]) != NULL);
        snprintf(file, sizeof file, "%s/a", names[i]);
        CHECK_INT(gd_file_create(x.env, x.root, file, O_RDWR, &fd, &x.err),
                  GD_CORRUPT);
        CHECK_INT(gd_file_create_directory(x.env, x.root, names[i], &x.err),
                  GD_CORRUPT);
        CHECK_INT(scratch_count(&x, "elsewhere", "", NULL), 0);
        CHECK_INT(scratch_destroy(&x), 0);
    }
}
