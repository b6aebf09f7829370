# SPDX-License-Identifier: Apache-2.0
#
# Builds the engine and its tests in C, from the top of the checkout:
#
#   make -f tests/native.mk -j VARIANT=asan TARGET...
#
# VARIANT is plain; asan (clang, with the sanitizers of addresses and undefined
# behaviour, and ready for libFuzzer); or tsan (gcc, with that of threads). All
# files are in .build/VARIANT. TARGET is lib (the engine and the helpers of the
# tests as shared libraries), plugin (nbdkit's), fuzzers, programs (all programs
# of tests/c), or the path of one of its sources without .c.

VARIANT ?= plain
OUT := .build/$(VARIANT)

CFLAGS := -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fPIC -Iglance_dedup -I.
LDLIBS := -lcrypto -lxxhash -llz4 -lzstd -lz -lpthread
CC_plain := gcc
FLAGS_plain := -O2
CC_asan := clang
# gcc defines the macro by itself, clang does not.
FLAGS_asan := -O1 -g1 -D__SANITIZE_ADDRESS__ -fsanitize=fuzzer-no-link,address,undefined \
	-fno-sanitize-recover=all -fno-omit-frame-pointer
CC_tsan := gcc
FLAGS_tsan := -O1 -g1 -fsanitize=thread
COMPILE := $(CC_$(VARIANT)) $(CFLAGS) $(FLAGS_$(VARIANT))

objects = $(patsubst %.c,$(OUT)/%.o,$(wildcard $(1)))
ENGINE := $(call objects,glance_dedup/engine/*/*.c)
SUPPORT := $(call objects,tests/c/support/*.c)
PLUGIN := $(call objects,glance_dedup/nbdkit/*.c)
FUZZ := $(call objects,$(filter-out $(wildcard tests/fuzz/fuzz_*.c),\
	$(wildcard tests/fuzz/*.c)) tests/c/support/simple_maintainer.c)
TARGETS := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
PROGRAMS := $(patsubst %.c,%,$(wildcard tests/c/*/test_*.c))
# Programs find the libraries in their directory, in any checkout.
LINK := -L$(OUT) -Wl,-rpath,$(abspath $(OUT))

.PHONY: lib plugin fuzzers programs $(PROGRAMS)
lib: $(OUT)/libengine.so $(OUT)/libsupport.so
plugin: $(OUT)/plugin.so
fuzzers: $(addprefix $(OUT)/,$(TARGETS))
programs: $(PROGRAMS)
$(PROGRAMS): %: $(OUT)/%

$(OUT)/%.o: %.c tests/native.mk
	@mkdir -p $(@D)
	$(COMPILE) -MMD -MP -c $< -o $@

# With sanitizers a test compiles in a third of the time without optimization.
# It runs about as fast, since the engine has most of the work.
ifneq ($(VARIANT),plain)
$(PROGRAMS:%=$(OUT)/%.o): COMPILE += -O0
endif

$(OUT)/libengine.so: $(ENGINE)
	$(COMPILE) -shared $^ -o $@ $(LDLIBS)

$(OUT)/libsupport.so: $(SUPPORT) $(OUT)/libengine.so
	$(COMPILE) -shared $(SUPPORT) -o $@ $(LINK) -lengine

# All in one file: nbdkit has no path for our libraries.
$(OUT)/plugin.so: $(PLUGIN) $(ENGINE)
	$(COMPILE) -shared $^ -o $@ $(LDLIBS)

$(addprefix $(OUT)/,$(PROGRAMS)): %: %.o $(OUT)/libsupport.so
	$(COMPILE) $< -o $@ $(LINK) -lsupport -lengine $(LDLIBS)

$(addprefix $(OUT)/,$(TARGETS)): $(OUT)/%: $(OUT)/tests/fuzz/%.o $(FUZZ) \
		$(OUT)/libengine.so
	$(COMPILE) -fsanitize=fuzzer $< $(FUZZ) -o $@ $(LINK) -lengine $(LDLIBS)

-include $(shell find $(OUT) -name '*.d' 2>/dev/null)
