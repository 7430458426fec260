package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

const dsn = "app:secret@tcp(127.0.0.1:3306)/shop"

// The first program of the README runs as it stands: only its DSN is another. Two
// processes of it at a time sell two units.
func TestTheProgramOfTheREADMERunsAsItStands(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		program := build(t, shop.DSN)
		db, err := sql.Open("mysql", shop.DSN)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if _, err := db.Exec("INSERT INTO products (id, stock) VALUES (42, 3)"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() {
				if out, err := exec.CommandContext(ctx, program).CombinedOutput(); err != nil {
					t.Errorf("%v: %s", err, out)
				}
			})
		}
		both.Wait()
		var stock int
		if err := db.QueryRow("SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil || stock != 1 {
			t.Errorf("stock %d, %v; want 1", stock, err)
		}
	})
}

// build compiles main.go with another DSN.
func build(t *testing.T, with string) (program string) {
	t.Helper()
	source, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(source), dsn) {
		t.Fatalf("main.go does not have the DSN %s", dsn)
	}
	path, err := filepath.Abs("main.go")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	changed, overlay := filepath.Join(dir, "main.go"), filepath.Join(dir, "overlay.json")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{path: changed}})
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string][]byte{changed: []byte(strings.Replace(string(source), dsn, with, 1)), overlay: replace} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program = filepath.Join(dir, "quickstart")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-overlay", overlay, "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}
