//go:build unix

package tempserver

import (
	"bufio"
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// packages are where Debian has the plugins of a server.
var packages = map[Flavour]string{MySQL: "mysql-server-core", MariaDB: "mariadb-server"}

// checkPlugins returns an error if the options load a plugin that b does not have.
// The server itself would only log that, and run without.
func (b Binary) checkPlugins(options []string) error {
	folder, files := pluginFiles(options)
	if len(files) == 0 {
		return nil
	}
	if folder == "" {
		var err error
		if folder, err = b.pluginFolder(); err != nil {
			return err
		}
	}
	for _, file := range files {
		if !exists(filepath.Join(folder, file)) {
			return fmt.Errorf("tempserver: %s has no plugin %s in %s; Debian has it in the package %s, and scripts/install-servers.sh installs it",
				b, file, folder, packages[b.Flavour])
		}
	}
	return nil
}

// pluginFiles returns the folder for plugins that the options name, "" if they name none,
// and the files of the plugins that they load.
func pluginFiles(options []string) (folder string, files []string) {
	for _, option := range options {
		name, value, _ := strings.Cut(option, "=")
		switch strings.ReplaceAll(name, "_", "-") {
		case "--plugin-dir":
			folder = value
		case "--plugin-load", "--plugin-load-add":
			for _, file := range strings.FieldsFunc(value, func(r rune) bool { return r == ';' || r == ':' }) {
				if _, after, named := strings.Cut(file, "="); named {
					file = after
				}
				if filepath.Ext(file) == "" {
					file += ".so"
				}
				files = append(files, file)
			}
		}
	}
	return folder, files
}

// pluginFolders are the folders that programs have been asked for, by their paths.
var pluginFolders sync.Map

// pluginFolder returns where b looks for plugins. It is asked once.
func (b Binary) pluginFolder() (string, error) {
	if folder, known := pluginFolders.Load(b.Path); known {
		return folder.(string), nil
	}
	args := slices.Concat(b.command[1:], []string{"--no-defaults"}, b.options, []string{"--verbose", "--help"})
	out, err := exec.Command(b.command[0], args...).Output()
	if err != nil {
		return "", fmt.Errorf("tempserver: %s --verbose --help: %w", b.Path, err)
	}
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		if folder, ok := strings.CutPrefix(lines.Text(), "plugin-dir "); ok {
			folder = filepath.Clean(strings.TrimSpace(folder))
			pluginFolders.Store(b.Path, folder)
			return folder, nil
		}
	}
	return "", fmt.Errorf("tempserver: %s does not say where its plugins are", b.Path)
}
