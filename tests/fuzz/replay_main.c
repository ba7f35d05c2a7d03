/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replays stored inputs through a fuzz target without libFuzzer: every file named on the command line, and
 * every file of every folder named there. This is how the corpora run in the default test suite, with any
 * compiler. A run that finds no input fails, so that a lost corpus is noticed.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MOST_PATH_BYTES 4096

static unsigned replayed;

/* The block has exactly the size of the file, so that a sanitizer sees a read beyond it. */
static int replay_file(const char *path, size_t size)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = malloc(size == 0 ? 1 : size);
    int ok = file != NULL && data != NULL && fread(data, 1, size, file) == size;

    if (ok) {
        printf("%s\n", path);
        (void)LLVMFuzzerTestOneInput(data, size);
        replayed++;
    } else {
        fprintf(stderr, "cannot read %s\n", path);
    }
    if (file != NULL)
        (void)fclose(file);
    free(data);
    return ok;
}

static int replay(const char *path);

static int replay_folder(const char *path)
{
    DIR *folder = opendir(path);
    const struct dirent *entry;
    int ok = folder != NULL;

    while (ok && (entry = readdir(folder)) != NULL) {
        char inner[MOST_PATH_BYTES];
        if (entry->d_name[0] == '.')
            continue;
        ok = snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name) < MOST_PATH_BYTES && replay(inner);
    }
    if (folder != NULL)
        (void)closedir(folder);
    return ok;
}

static int replay(const char *path)
{
    struct stat info;

    if (stat(path, &info) != 0) {
        fprintf(stderr, "cannot find %s\n", path);
        return 0;
    }
    return S_ISDIR(info.st_mode) ? replay_folder(path) : replay_file(path, (size_t)info.st_size);
}

int main(int argc, char **argv)
{
    int ok = 1;
    int i;

    for (i = 1; i < argc; i++)
        ok = replay(argv[i]) && ok;
    printf("%u inputs\n", replayed);
    return ok && replayed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
