// Package plugin makes the analyzer known to golangci-lint, as a module plugin with the
// name mysqllock: see docs/vet.md.
package plugin

import (
	"github.com/golangci/plugin-module-register/register"
	"golang.org/x/tools/go/analysis"

	"github.com/mysqllock/mysqllock/mysqllockvet"
)

func init() {
	register.Plugin("mysqllock", func(any) (register.LinterPlugin, error) { return linter{}, nil })
}

type linter struct{}

func (linter) BuildAnalyzers() ([]*analysis.Analyzer, error) {
	return []*analysis.Analyzer{mysqllockvet.Analyzer}, nil
}

func (linter) GetLoadMode() string { return register.LoadModeTypesInfo }
