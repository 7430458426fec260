// Mysqllockvet finds code that gets no lock, or less of one than it looks like:
//
//	go vet -vettool=$(which mysqllockvet) ./...
//
// It also runs by itself: mysqllockvet ./...
package main

import (
	"golang.org/x/tools/go/analysis/singlechecker"

	"github.com/mysqllock/mysqllock/mysqllockvet"
)

func main() { singlechecker.Main(mysqllockvet.Analyzer) }
